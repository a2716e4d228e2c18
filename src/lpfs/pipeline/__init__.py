"""The protocol that every result follows: which rows train, which choose, which judge, and for how long."""
