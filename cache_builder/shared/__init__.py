"""What can be seen of the servers' shared store from outside: ``ssd-cache redis-status``."""
