"""Who reads a planned log: this process, or a cluster. All engines give the same rows, bit by bit."""
