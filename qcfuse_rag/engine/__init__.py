"""One model, one store and one prompt template behind one object.

In: passages to warm and questions to answer.
Out: answers, alone or scheduled together.
"""
