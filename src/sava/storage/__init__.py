"""storage: a topic's messages, from the append to the object that holds them for years.

A message is appended to the journal of its broker, answered when enough disks have it, kept in a cache for
those who follow, turned into a segment, and let go of by the journal. Whoever reads gets one gapless stream,
wherever its messages are.

* one broker's storage, assembled: ``broker_storage``; the nouns: ``types``, ``errors``, ``keys``;
* one topic: ``topic_log``, with ``tiered`` (what is read from where), ``producers`` (what was appended
  before), ``room`` (who waits) and ``rest`` (when it may go elsewhere); ``guard``: whether it is still ours;
* the journal: ``journal`` over ``ordered_log``, ``answering`` and ``commitment``; what it holds:
  ``holdings``, ``journal_index``, ``leftovers``, found again by ``replay``, read back by ``frame_reader``;
  ``cache`` has the newest of it;
* segments: ``uploader``, ``row_groups``, ``segment``, ``segment_file``; listed in ``catalog``; removed by
  ``retention``, and by ``orphans`` what nothing names;
* the object store: ``objectstore``, ``backends``, ``probe``, ``store_identity``; ``staging`` for what waits
  to be published whole;
* copies from and to other clusters: ``chains``, ``chain_keeping``, ``marks``, ``seen``, ``link_cursors``;
* from outside, changing nothing: ``inspection``, ``journal_inspection``.
"""
