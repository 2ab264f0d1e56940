"""A whole deployment from one file: routers and workers, what died started again, as many as the load asks for.

`controller` decides and is pure, `scaling` says how many workers a load asks for, `deployment` performs. Requests and
tokens go from routers to workers; nothing of them comes here.
"""
