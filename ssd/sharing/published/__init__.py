"""What a namespace knows as published text: chunks named by what they hold, and a head that puts them in order.

``chunk`` and ``chunking`` are the pieces, ``head`` the list of them with the place in the log where they end, ``store``
where both lie (``redis_store``, ``url_store``) and who has the lease. ``publisher`` writes for all namespaces of a
process, ``joiner`` takes what they lack; ``transfer`` and ``purge`` do for directories what these do for caches.
"""
