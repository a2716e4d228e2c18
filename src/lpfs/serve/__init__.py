"""Answer requests with the current bundle of ``lpfs online``, and swap to the next one without losing a request.

Needs the extra ``lpfs[serve]``; see ``docs/online.md``.
"""
