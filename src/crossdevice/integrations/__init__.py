"""Adapters for other frameworks and for older interfaces."""
