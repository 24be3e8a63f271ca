"""The console command scaled-mask-softmax.

Standard library only, and it imports neither torch nor scaled_mask_softmax: it is for when they do not import.
"""
