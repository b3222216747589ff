"""Integrations: use Scantling in other trainers."""
