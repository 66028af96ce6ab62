"""Plan a run before paying for it: parameters, memory, time, disk, and a better layout, on any machine."""
