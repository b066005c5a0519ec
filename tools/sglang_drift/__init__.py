"""Compares what this repository knows of SGLang's storage contract with an SGLang release.

Only the release's wheel is fetched, and read without being installed: its dependencies are
gigabytes and want a GPU. ``python -m tools.sglang_drift`` runs it, and the session ``drift``.
"""
