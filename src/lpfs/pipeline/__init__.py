"""The whole job as stages: plan, split, pretrain, search, prune, evaluate, write the results.

Read ``select.py`` first: it calls the stages in order. ``plan.py`` decides everything before training,
``stages.py`` trains and prunes, ``results.py`` writes the results.
"""
