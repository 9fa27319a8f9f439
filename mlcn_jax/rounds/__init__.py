"""Local rounds: workers that rarely communicate train one model; each takes many steps between exchanges of changes.

Source: Douillard et al. 2023, arXiv 2311.08105 (DiLoCo), section 2, algorithm 1.
"""
