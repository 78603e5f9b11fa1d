"""The facts keepstep is made of: what was seen, claimed, decided and done.

This room is pure: pydantic and the standard library, no clock, no I/O. Every other room imports it and it imports none.
"""
