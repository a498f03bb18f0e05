"""The screen of `watch`: pages about a living run, drawn again as the run goes on.

``plot`` draws curves in characters, ``pages`` makes the lines of each page from a RunView, ``screen`` lays them out,
``terminal`` draws them and reads keys.
"""
