"""What a namespace knows as published text: ``format``, ``store``, who writes it (``publisher``) and who takes it.

``joiner`` takes what a cache lacks, ``published`` runs both for the namespaces of a process, and ``commands`` do for
directories what these do for caches.
"""
