"""The methods inside other people's trainers."""
