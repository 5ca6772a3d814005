"""Drafters to compare with: none, prompt lookup, and the most frequent continuation."""
