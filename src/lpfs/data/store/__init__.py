"""A Dataset on disk: its layout, how it is written, and whether it is whole."""
