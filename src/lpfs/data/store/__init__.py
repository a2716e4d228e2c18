"""A Dataset on disk: its layout, its location, and the writer."""
