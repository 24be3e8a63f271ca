"""The console command scaled-mask-softmax.

Standard library only, and it imports neither torch nor scaled_mask_softmax: it is for when they do not import. The
bench, which measures them, is imported only when it is asked for.
"""
