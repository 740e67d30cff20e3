"""JSON Schema: documents with local references only, evaluation within a budget, and containment of one
schema in another.
"""
