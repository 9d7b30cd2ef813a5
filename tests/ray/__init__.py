"""On a Ray cluster of two nodes on this machine; `make ray` runs them. Clients of the endpoint run without one."""
