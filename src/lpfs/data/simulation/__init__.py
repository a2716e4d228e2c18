"""Parts of the simulator: what is asked for, the world it is drawn from, what it writes."""
