"""The command line `keepstep`."""
