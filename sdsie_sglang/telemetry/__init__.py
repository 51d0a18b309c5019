"""What ran, published: per request in meta_info, per server in /metrics, per cycle in a trace file."""
