"""Collectives between replicas: process groups, background threads, shards, and reports of failed processes."""
