"""
Plans that survive failures: pipeline templates, which of them are instantiated, and what becomes of them when nodes
are lost. Uses numpy only.
"""
