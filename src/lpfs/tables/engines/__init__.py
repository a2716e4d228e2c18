"""One engine a kind of hardware; all give the same numbers."""
