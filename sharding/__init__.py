"""Chips, meshes, logical-axis rules and memory budgets."""
