"""Probes in the kernel: finding what to probe, setting the probes, reading what they added up."""
