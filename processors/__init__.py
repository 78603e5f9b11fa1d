"""The rooms that think. Pure: they are told things and answer; nothing here reads a clock, a file, a socket or chance."""
