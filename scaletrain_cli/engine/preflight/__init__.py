"""What the ranks of an attempt find out together before the first step: is any device or link worse than the others?"""
