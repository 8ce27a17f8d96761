"""Words and names that the generated workloads draw from: common English, written down for this project.

Each is one token after a space in the tokenizers of SmolLM2 and Gemma 3, so that a scored word is one prediction
there, and is rare in the haystack, so that prose does not compete with it.
"""

from __future__ import annotations

_NAMES = """
Adam Alice Amelia Andrea Anna Arthur Ben Bruno Caroline Cecil Clara Claude Colin Daniel Diana Edith
Edward Eliza Emma Eric Esther Felix Frank Frederick Gabriel George Grace Hannah Harold Helen Henry Hugo
Isaac Ivan Jacob Jane Joan Julia Julian Karen Kevin Laura Leo Leonard Lewis Linda Louis Lucy Luke
Margaret Maria Martin Maurice Max Michael Miriam Monica Nathan Nina Oliver Olivia Oscar Otto Patrick
Peter Philip Rachel Ralph Rebecca Robert Roger Rosa Ruth Samuel Sarah Simon Sophie Stephen Susan
Theodore Thomas Victor Vincent Virginia Walter William
"""

_WORDS = """
acid actor actress agent airport album alley amber anchor angel anger animal ankle answer apartment
apple arch arena armor arrow artist asset athlete attack attic author autumn baby bacon badge baker
balcony ball ballet bamboo banana bank banner bar barn barrel basket bath battle bay beach beacon bean
bear beard beast beaver bed bee beef beer bell belt bench berry bicycle bill bird birth bishop blanket
blood blossom board boat bone book boot border boss bottle bow bowl box boy brain branch brass bread
breeze brick bridge bronze broom brother brush bubble bucket bud bug bull bus bush butter button cabin
cable cactus cage cake calf camel camera camp canal candle canoe cap captain car card cargo carpet
carrier carrot cash castle cat cattle cave cedar cell cent chain chair chalk chamber champion channel
chapter charcoal charm cheek cheese cherry chess chest chicken chief chimney chin chip choir church
circus clay clerk cliff clinic clock clone closet cloth clothing cloud club cluster coach coal coast
coat coffee coffin coin collar colony column comet concert contract cook cookie copper coral cord core
corn corner cottage cotton couch council counter court cousin cover cow crab crack cradle craft crane
cream creek crew critic crop cross crow crown crystal cube cup curtain curve customer dairy dancer
daughter dawn deck deer deity dentist deputy desert desk device dial diamond diet dinner dirt dish disk
dock doctor dog doll dolphin donkey door dose dot dove dragon drawer dress driver drop drug drum duck
dust eagle earth editor egg elbow elder elephant elite emperor empire engine ensemble envelope episode
equation essay estate expert eye fabric face fairy falcon family fan farm farmer father fault fax
feather fee fence film finger fire fish fist fit flame flash fleet flesh flight flood floor flour flower
fluid flute fly foam fog food foot forest fork fort fountain fox friend frog frost fruit fuel fur
gallery game garden garlic gate gear gene ghost giant gift ginger girl glacier glass globe glory glove
goal goat gold golf goose grain grape grass gravel grid ground guard guest guide guitar hair hall hammer
hand harbor harvest hat hawk heart heat hedge heel helmet hero hill hole home honey hook horn horse
hospital hotel hour house hunter husband ice image ink inn insect iron island ivory jacket jar jaw jeans
jewel joint joke journal judge juice jungle jury kettle kid kidney king kiss kitchen kite knee knife
knight lab label ladder lady lake lamp land lane lantern lap laser laugh lawn lawyer layer leaf league
leather leg lemon lens leopard lesson letter lever lid lift light limb lion lip lizard loan lobster lord
love lumber lunch lung magazine magnet maid mail major mall man manual map maple marble market mask mass
master mat mate math matrix mayor meadow meal meat medal melody metal mile milk mill mine mirror mist
model mom money monkey month mood moon mother motor mountain mouse mouth mud muscle museum music myth
nail neck needle nerve nest net newspaper night noise noon north nose novel nurse nut oak ocean oil
olive onion opera orange orbit orchard organ outfit oven owner oyster pack pad page pain paint palace
pan panda panel paper park parrot partner party pass patient paw peach peak peanut pearl peer pencil
penny pepper person pet phone photo phrase piano pie pig pigeon pile pill pillow pilot pin pine pipe
pirate pit pizza plane planet plant plastic plate player plot plum pocket poem poet pole poll pond pool
pope porch post pot potato pound powder prayer prey priest prince princess prize prophet pulse pump
pumpkin pupil puppet purse puzzle queen rabbit rack radio rage rail rain ranch rat razor referee rent
ribbon rice rider ring river road robe robot rock rocket rod roll roof room rope rose rug ruin ruler
sack saddle sage sailor saint salad salmon salt sand sauce scale scene scholar school scientist screen
script seal seat secret seed shadow shape shark sheep shelf shell shepherd shield ship shirt shoe shop
shore shoulder shower shrine sign silk silver singer sister site skin skull sky sleep slot smoke snake
snow soap soil soldier son song soul soup sphere spider spirit sponge spoon spot spring squad squirrel
stage stamp star statue steam stew stick stomach stone store storm street student studio stuff sugar
suit summer sun sunset surgeon sword tail tailor tank tape tavern tax tea teacher team tear teen temple
tent theater thigh throat throne thunder tide tiger tile timber tin tire toe tomato tongue tool tooth
tourist towel tower town toy track trail train tray treasure tribe truck trunk tube tunnel twin uncle
uniform valley van vase vault vein velvet vendor verse vessel veteran video village vine violin visitor
volcano wage wagon waist wall wallet walnut warrior water wave wax web wedding whale wheat wheel widow
wife willow window wing winter wire witch witness wolf woman wood wool worker worm wrist yard youth
zebra
"""

NAMES: tuple[str, ...] = tuple(_NAMES.split())
WORDS: tuple[str, ...] = tuple(_WORDS.split())
