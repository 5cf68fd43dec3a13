"""What is known of prefixes across requests, so that what was computed a moment ago is not computed again.

``tree`` holds the policy: which prefixes have their keys, values and states kept, and where. It knows token ids and numbers
of places, no arrays. The backends of ``jev.model`` own the memory behind the places.
"""
