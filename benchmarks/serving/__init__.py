"""What a request costs the embedded server, beside other servers and what no server can do without."""
