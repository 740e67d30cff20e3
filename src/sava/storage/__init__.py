"""storage: a topic's messages, from the append to the object that holds them for years.

The journal of a broker takes a message, answers when enough disks have it, and keeps it until it is in a
segment; a cache has it for those who follow. A reader gets one gapless stream, wherever its messages are.

* one broker's storage, assembled: ``broker_storage``; the nouns: ``types``, ``errors``, ``keys``;
* one topic: ``topic_log``, with ``tiered`` (what is read from where), ``producers`` (what was appended
  before, and which open of a name is the last) and ``clean_marker`` (when it may go elsewhere);
* the journal: ``journal`` over ``commit_queue``; what it holds: ``journal_index``;
* segments: ``uploader``, ``segment``, ``segment_file``; listed in ``catalog``; dropped and merged by
  ``maintenance``; what nothing names any more goes by ``orphans``;
* the object store: ``objectstore``; ``staging`` for what waits to be published whole;
* copies from and to other clusters: ``source_positions``, ``source_keeping``, ``origin_marks``;
* from outside, changing nothing: ``inspection``.
"""
