"""What a run will cost, said before it starts."""
