"""LPFS, LPFS++ and every rival: one contract, a file a method."""
