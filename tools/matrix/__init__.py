"""The table of behaviours and backends, from the reports of the conformance suite's runs.

``python3.12 -m tools.matrix REPORT...`` writes docs/matrix.md and docs/matrix.json.
"""
