"""Gates: the mathematics, the proximal optimizer, control of λ; attach, absorb, prune."""
