"""Detector benchmarks: classification accuracy and throughput, false alarms, time to verdict."""
