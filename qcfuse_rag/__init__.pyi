from .cluster.workers import RayWorkers as RayWorkers
from .engine.config import EngineConfig as EngineConfig
from .engine.engine import FusionEngine as FusionEngine
from .engine.scheduler import Scheduler as Scheduler
from .engine.scheduler import SchedulerSettings as SchedulerSettings
from .errors import QCFuseError as QCFuseError
from .fusion.method import Method as Method
from .fusion.report import FusionReport as FusionReport
from .generation.decoding import Generation as Generation
from .generation.decoding import TextStream as TextStream
from .generation.sampling_params import SamplingParams as SamplingParams
from .ingestion.warm_job import WarmSummary as WarmSummary
from .methods import METHODS as METHODS
from .methods import choose_method as choose_method
from .methods import make_method as make_method
from .prompts.segments import Prompt as Prompt
from .prompts.template import PromptTemplate as PromptTemplate
from .runtime.language_model import LanguageModel as LanguageModel
from .store.backends.base import KVStore as KVStore
from .store.backends.disk import DiskStore as DiskStore
from .store.backends.memory import MemoryStore as MemoryStore
from .store.backends.remote import RemoteStore as RemoteStore
from .store.backends.tenant import TenantStore as TenantStore
from .store.backends.tiered import TieredStore as TieredStore
from .store.factory import open_store as open_store

__version__: str
