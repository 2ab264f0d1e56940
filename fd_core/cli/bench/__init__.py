"""`fdcore bench`: latency, throughput, and the cost of serving, planning and routing."""
