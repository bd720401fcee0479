"""What methods are made of: specs, transforms, codecs, stores, policies, trees and the compiler."""
