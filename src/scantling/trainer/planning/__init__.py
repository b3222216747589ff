"""Planning: predict the memory, traffic and FLOPs of a run before it starts."""
