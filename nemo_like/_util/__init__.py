"""Small things that every folder uses."""
