"""Every table and figure of the papers as a named recipe: a plan of jobs, and claims to test.

Each module here has a tuple RECIPES; `parsifl reproduce NAME` runs one of them.
"""
