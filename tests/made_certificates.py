"""Certificates for servers and clients on this machine."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certificate(folder, name, issuer=None, days=1):
    """A key and a certificate for 127.0.0.1, signed by itself or by an issuer; paths and what signs others."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    by, by_key = (issuer[2].subject, issuer[3]) if issuer else (subject, key)
    builder = x509.CertificateBuilder(by, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=10))
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(issuer is None, None), True)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), False)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    issued = x509.AuthorityKeyIdentifier.from_issuer_public_key(by_key.public_key())
    builder = builder.add_extension(issued, False)
    made = builder.sign(by_key, hashes.SHA256())
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    pem = serialization.Encoding.PEM
    paths[0].write_bytes(made.public_bytes(pem))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(pem, *plain))
    return (*paths, made, key)
