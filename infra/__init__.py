"""See DESIGN in README.md."""
