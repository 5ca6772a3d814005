"""A smaller cache of what a replay of logs shows to be of use."""
