"""The endpoint, from requests to the process."""
