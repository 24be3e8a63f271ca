"""What ``scaled-mask-softmax bench`` runs: this operator beside its rivals, each verified before it is timed.

cases -> problems -> reference, peers, timing -> cells -> results -> report, command.
"""
