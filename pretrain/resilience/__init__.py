"""A run that looks after itself: signals, wishes, hangs, launches, and the check of the nodes before it starts."""
