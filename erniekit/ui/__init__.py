"""The page of `erniekit ui`: JSON endpoints over what the command line does, and the static files that show it.

The page is one user's view of one folder. It computes nothing itself: a run, a preview of data and a server that
answers are processes of the same commands that a terminal starts.
"""
